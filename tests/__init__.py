"""Claims about tfdp, in the rooms of tfdp; `harness` is what they share."""
