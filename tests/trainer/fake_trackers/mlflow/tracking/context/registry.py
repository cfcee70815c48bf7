def resolve_tags(tags):
    return tags
