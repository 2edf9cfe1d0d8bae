"""Models: how they are built or opened, how they are prompted, and how their text is read."""
