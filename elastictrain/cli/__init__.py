"""The command line. Importing it, or asking it for help, imports no torch."""
