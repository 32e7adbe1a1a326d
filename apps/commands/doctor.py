"""`edge doctor`: finds problems of this device, its workers and their links, and suggests remedies."""

from __future__ import annotations

import argparse

from apps.options import add
from apps.show.progress import ShownSteps
from apps.show.table import print_columns, print_json
from quant.text import counted

HELP = "Check this device, workers and links for problems, and suggest what to do."
COLUMNS = ("", "where", "check", "finding")
EXIT_PROBLEMS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    devices = parser.add_mutually_exclusive_group()
    add(devices, "--workers", help="check also these workers, HOST[:PORT],..., and every link")
    add(devices, "--cluster", help="check also the workers of this file (cluster.toml), and every link")
    add(parser, "--insecure", "--json")


def run(args: argparse.Namespace) -> int:
    """Check and print the findings; the exit code is 8 if there are problems."""
    from devices.cluster_file import read_cluster
    from edge.profiling.doctor.examine import examine
    from edge.profiling.doctor.findings import NOTE, PROBLEM

    addresses = args.workers or ()
    if args.cluster is not None:
        addresses = [str(device.address) for device in read_cluster(args.cluster).workers]
    report = examine(addresses, insecure=args.insecure, steps=ShownSteps("doctor"))
    problems, notes = report.count(PROBLEM), report.count(NOTE)
    if args.json:
        print_json(report.to_json())
    else:
        advice = [f"{f.level}: {f.check} of {f.where}: {f.advice}" for f in report.findings if f.advice]
        rows = [(f.level, f.where, f.check, f.seen) for f in report.findings]
        sums = f"{counted(problems, 'problem')}, {counted(notes, 'note')}"
        print_columns(COLUMNS, rows, COLUMNS[:3], [*advice, sums])
    return EXIT_PROBLEMS if problems else 0
