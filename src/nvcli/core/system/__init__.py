"""Facts of the machine and of Linux: memory, containers, GPUs, files, processes, terminals."""
