"""The command line and what it needs: run folders, reports, serving."""
