"""Options that several verbs share: each group is a dataclass that a verb's config inherits from."""
