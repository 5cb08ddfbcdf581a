"""Our kernels inside other people's programs: torch ops made of Mojo, a MAX graph that is a torch module."""
