"""Where user code is called, and nowhere else: in whose turn, in which thread, and what is left of it when it dies."""
