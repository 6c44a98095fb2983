"""The commands of `zsim`, a module each: its options, and what it calls.

What is heavy is imported by the command that needs it, when it runs.
"""
