"""The gradient methods ESSA is measured against, on the same engine, rows and rewards.

GRPO (arXiv 2402.03300), DAPO (2503.14476), CISPO (2506.13585) and Dr. GRPO (2503.20783), each with the
focal weight of F-GRPO (2602.06717), over all LoRA factors or, as the paper's SVD-GRPO (2507.04453), over
the singular values that ESSA searches.
"""
