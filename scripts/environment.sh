# Sourced by the scripts that make an environment beside the main one: what all of them begin and end with.
# Sets outer (the packages of PYTHON), target, site and pip.

# begin PYTHON DIRECTORY MADE_FROM: end the script if DIRECTORY was made from the same, else make it anew, empty.
begin() {
    target=$2
    outer=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    made_from=$(printf '%s\n' "$3"; cat "$here/environment.sh"; echo "$outer")
    if [ -f "$target/.made-from" ] && [ "$made_from" = "$(cat "$target/.made-from")" ]; then
        touch "$target/.made-from"
        exit 0
    fi
    rm -rf "$target"
    "$1" -m venv "$target"
    pip="$target/bin/python -m pip --quiet --disable-pip-version-check"
    site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
}

# PYTHON's own packages (torch, pytest, Syncline itself) are seen from here on, and not installed twice.
see_outer() {
    # addsitedir, not a bare path: Syncline's editable install is itself a .pth file there.
    echo "import site; site.addsitedir('$outer')" > "$site/outer.pth"
}

finish() {
    printf '%s\n' "$made_from" > "$target/.made-from"
}
