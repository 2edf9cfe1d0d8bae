"""What asks DVC: the plan, rebuilds, replication with other seeds and proposals of the next version."""
