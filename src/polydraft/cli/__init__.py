"""The command line: thin faces on the library, imported late so that help comes at once."""
