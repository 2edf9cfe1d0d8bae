"""What asks DVC: the plan, rebuilds and proposals of the next version."""
