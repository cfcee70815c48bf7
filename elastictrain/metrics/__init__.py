"""What is known about a run: logged values, event files, throughput, and what a person reads on the terminal.

Only ``throughput`` imports torch, so that the command line may look here.
"""
