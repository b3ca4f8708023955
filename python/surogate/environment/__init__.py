"""The interpreter's surroundings: import path, working directory, optional packages, CUDA libraries of packages."""
