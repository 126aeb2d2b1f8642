"""The command line: a file for each command, which parses options, calls the code that does the work, and shows the
result.

`main` is the entry point and the only place that turns errors into exit codes. Help and configuration errors come at
once, so nothing here imports more than typer at the top.
"""
