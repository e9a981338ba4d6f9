"""Exercises for the lessons: `python -m minidl.learn`.

An exercise is a Python file with a hole. exercises/ has the files that are copied into the learner's folder, solutions/
the same files without the hole, and checks/ a file for each lesson that calls the functions of an answer and compares
their results with a definition. An exercise has the same name, such as `conv_2.py`, in all places.
"""
