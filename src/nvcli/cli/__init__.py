"""The command line: a file for each command, which parses options, calls what does the work, and shows the outcome.

`main` is the way in and the only place that turns errors into exit codes. Help and errors of configuration come at
once, so nothing here imports more than typer at the top.
"""
