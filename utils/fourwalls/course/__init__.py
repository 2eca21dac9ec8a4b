"""The course around the library: guesses, kept functions, progress, claims, the learner's own place.

Nothing here computes anything that is taught; it asks, remembers and compares. All of it is local to the machine.

    question -> guess -> answer -> what you can now say

Reference: CURRICULUM, "The learner's own place".
"""
