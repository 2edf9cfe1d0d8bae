"""Commands on the whole pipeline: plans, pre-registration, drafts, rebuilds, pages and the wheel."""
