"""Trust: nothing is used that was not checked against something outside itself.

`lock` holds files against dvc.lock, `recount` holds reports against answers and answers against transcripts, and the
signatures say who made a model, a decision or an approval.
"""
