"""MAX's own server with this project's graph and kernels in it: ``shipway serve``, ``shipway bench-serve``."""
