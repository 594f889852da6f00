"""`lockstep doctor`."""


def command() -> None:
    """Show the frameworks and devices found here, and how to install what is missing."""
    from lockstep import backends
    from lockstep.data import turbojpeg
    from lockstep.data.dali import DISTRIBUTIONS, INSTALL
    from lockstep.run import environment

    about = environment("torch")
    print(f"lockstep   {about['lockstep']}, Python {about['python']}, NumPy {about['numpy']}")
    print(f"machine    {about['processor']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.1f} GiB")
    for name, framework in backends.FRAMEWORKS.items():
        version = framework.version()
        if version is None:
            print(f"{name:<10} missing; {framework.install}")
            continue
        try:
            devices = backends.load(name).devices()
        except (ImportError, OSError) as error:  # installed, but not for this machine
            print(f"{name:<10} {version} does not load: {error}")
            continue
        print(f"{name:<10} {version}: {'; '.join(devices)}")
    dali = backends.Framework(DISTRIBUTIONS, INSTALL)
    print(f"{'dali':<10} {dali.version() or f'missing; {dali.install}'}")
    found = "a window of a JPEG is decoded alone" if turbojpeg.library() else f"missing; {turbojpeg.INSTALL}"
    print(f"{'turbojpeg':<10} {found}")
