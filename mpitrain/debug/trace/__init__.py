"""A run as it was, on all ranks: written while it goes (`tracer`), read afterwards (`files`), put on one clock."""
