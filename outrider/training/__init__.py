"""Training of drafts from a target alone: prompts, the target's own answers, features, an EAGLE-3 head."""
