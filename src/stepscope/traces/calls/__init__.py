"""A call of any torch operator as data: its arguments as text, rebuilt from a trace, found in torch and bound.

Below all producers, because several of them call operators so: none of them may import another.
"""
