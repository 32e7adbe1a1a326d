"""What tests share: models, workers, clusters, commands, and where things lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FORKED_COMMAND = "tests.support.forked_command"  # what fork servers of tests run
ENGINE = "an engine process"  # asks them for one, in place of a command
MODULE = "a module"  # and for a process that runs one, which has the end of its name
MOST_OF_A_NAME = 15  # characters; Linux keeps no more
# Seconds that `edge.net.dialling` tries a link for: tests ask what is done with figures, and not how true they are.
BRIEF_LINKS = {"_TRIAL_S": 0.003, "_MEASURE_S": 0.01}
# Of `apps.show.progress`: after how long the first line of a job comes, and the next.
PLAIN_LINES = ("PLAIN_AFTER_S", "PLAIN_INTERVAL_S", "STILL_S")
NEVER_S = 1e9
