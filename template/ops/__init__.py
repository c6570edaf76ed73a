"""The Python behind the Makefile: one module a command, run as `python -m ops.<command>`."""
