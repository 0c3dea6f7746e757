"""Chrome traces as Kineto writes them: a tolerant parser, a compiled scanner, and files of several ranks."""
