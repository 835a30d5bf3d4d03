"""What tests say of digests: that contents are told apart, or that they are one."""

from mmcache.hashing import ContentHasher

H = ContentHasher()


def distinct(*values):
    return len({H.digest(value) for value in values}) == len(values)


def equal(*values):
    return len({H.digest(value) for value in values}) == 1 == len({H.digest("part", value) for value in values})
