"""`mpitrain trace RUN`: what the trace of a run says, on the terminal and as files for other programs."""
