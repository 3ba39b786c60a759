"""How a traced number depends on the rows of a batch: a mean, a sum, or neither.

On N replicas a mean over a replica's rows counts by its part of all rows, and a sum
over its rows counts in full. Which of the two a loss is, a user's code does not say,
but its graph does. This is an abstract interpretation of graphs: each tensor has a
form, and each operation a rule for the form of what it makes.

Reading order: `form` (the values), `forms` (who asks, and how a graph is walked),
`rules` (the table of operations), and the rules by subject: `arithmetic`, `axes`,
`shapes`, `contractions`, `others`.

Source: Cousot and Cousot 1977, https://doi.org/10.1145/512950.512973, for abstract
interpretation.
"""
