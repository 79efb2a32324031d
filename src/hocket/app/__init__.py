"""What people use: the command line, the display, the summary, the demo, the public Python names."""
