"""Release: the gate, the decision, the audit log and the lineage of what is released."""
