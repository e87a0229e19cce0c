"""A decoder written from the pages alone: buffer.py for all codecs, and a module for each codec.

Of a codec with an ID, the module `<codec>.py` has

    parameters(params, dtype): the parameters, refused where no encoder writes them;
    sections(parameters, dtype, chunk_nelem): the section table, refused where the codec takes no
        such chunk;
    used(header, nelem): where the bytes in use begin and end in the static part of a chunk;
    decode(header, nelem, static, dynamic): the bytes of the elements.

A module with NEEDS_BASE has check_base(header, static, base) too, which refuses another base than
the encoder had, and its decode takes the base's bytes as a last argument.
"""
