"""`clinrl site`: everything that the reports say, as one folder of pages that open from a disk."""
