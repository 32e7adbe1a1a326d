"""Run the first steps of a process in the foreground of a terminal."""

import fcntl
import os
import termios


def lead_terminal() -> None:
    """Where standard input is a terminal: lead it, as what a person starts in a window does; Ctrl-C then comes here."""
    if os.isatty(0):
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
