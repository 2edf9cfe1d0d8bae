"""What is asked and answered, counted against the exam: counts, the tests of them, and where they are kept."""
