"""`clinrl site`: the contents of all reports as one folder of pages that a browser opens from disk."""
