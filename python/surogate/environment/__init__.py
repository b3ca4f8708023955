"""What Python runs in: the import path, the working directory, optional packages, the CUDA libraries of packages."""
