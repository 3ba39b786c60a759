"""Abstract interpretation of a step's graph: dependence of tensors on rows of a batch.

On N replicas a mean over a replica's rows counts by its fraction of all rows, and a
sum over its rows counts in full. Which of the two a loss is, a user's code does not
say, but its graph does. Each tensor has a form, its abstract value, and each operation
a rule for the form of its outputs.

Reading order: `form` (the values), `forms` (the interpreter), `rules` (the table of
operations), and the rules by subject: `arithmetic`, `axes`, `shapes`, `contractions`,
`fallback`.

Source: Cousot and Cousot 1977, https://doi.org/10.1145/512950.512973, for abstract
interpretation.
"""
