"""Studies: what makes the tables and pictures of the documentation. Run from the repository root; not part of the package."""
