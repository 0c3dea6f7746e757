"""Chrome traces as Kineto writes them: a careful reader, a compiled one, and files of several ranks."""
