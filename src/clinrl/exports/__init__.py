"""What other tools open: logs of exams, model repositories, task folders and environments. They are unmodified."""
