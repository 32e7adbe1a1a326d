"""Starting and forking processes that run modules of this project."""
