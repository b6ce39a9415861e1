"""What the commands of ``maru`` do, one file each, and what they share: how a server is asked, and how answers are shown."""
