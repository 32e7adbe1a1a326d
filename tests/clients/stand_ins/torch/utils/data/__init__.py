"""Loading of data, in one process."""


def get_worker_info() -> None:
    """Return that there are no workers."""
