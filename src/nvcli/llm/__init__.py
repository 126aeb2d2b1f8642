"""nvcli for Python programs: engines that stay alive, rows from any iterable, answers as they come."""
