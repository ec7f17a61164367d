"""The coordinator: holds the committed tokens, applies the rule, picks gamma, and keeps both services fed."""
