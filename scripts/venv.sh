#!/bin/sh
# Makes and checks the virtual environments of the Makefile, which passes MPI, PYTHON and MPIEXEC by
# the environment.  Whatever can go wrong on a fresh machine ends in one line that says what to type.
#
#   venv.sh install VENV EXTRAS    make VENV if it is missing, and install hvdlite[EXTRAS] into it
#   venv.sh check VENV             is VENV what the Makefile made: this folder's, with this MPI alone?
set -eu

say() { echo "hvdlite: $*" >&2; }
die() {
    say "$@"
    exit 1
}

again="make${MPI:+ MPI=$MPI}"
apt="apt-get install"
[ "$(id -u)" = 0 ] || apt="sudo $apt"

# Why interpreter $1 cannot make the environment; nothing if it can.
fault_of() {
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=
    if [ -z "$version" ]; then
        echo "$1 does not run"
    elif ! "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "$1 is Python $version, hvdlite needs 3.11 or newer"
    elif ! "$1" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "$1 (Python $version) has no venv module"
    fi
}

# Sets python: the one asked for, or else the first on PATH that works.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        fault=$(fault_of "$PYTHON")
        [ -z "$fault" ] || die "$fault: type $again PYTHON=/path/to/python3, or leave PYTHON= out"
        python=$PYTHON
        return
    fi
    first_fault=
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        command -v "$python" >/dev/null 2>&1 || continue
        fault=$(fault_of "$python")
        if [ -z "$fault" ]; then
            [ -z "$first_fault" ] || say "$first_fault; using $python instead"
            return
        fi
        [ -n "$first_fault" ] || first_fault=$fault
    done
    case $first_fault in
    '') die "there is no python3 on PATH: type $apt python3 python3-venv, or $again PYTHON=/path/to/python3" ;;
    *venv*) die "$first_fault: type $apt python3-venv, or $again PYTHON=/path/to/another/python3" ;;
    *) die "$first_fault, and PATH has no newer one: install one and type $again PYTHON=/path/to/it" ;;
    esac
}

make_venv() {
    find_python
    say "making $venv with $("$python" --version)"
    trap 'rm -rf "$venv"; exit 1' INT TERM
    log=$("$python" -m venv "$venv" 2>&1) && trap - INT TERM && return
    rm -rf "$venv" # half made: it would be taken for a whole one
    echo "$log" >&2
    die "$python cannot make a virtual environment: type $apt python3-venv, or $again PYTHON=/path/to/another/python3"
}

need_system_launcher() {
    set -- ${MPIEXEC:-mpiexec} # may carry arguments
    command -v "$1" >/dev/null 2>&1 ||
        die "MPI=system finds no $1 on PATH: type module load ... (the site's MPI), or $apt openmpi-bin, or make MPI=mpich for a wheel"
}

install() {
    extras=$1
    start=$(date +%s)
    [ "$MPI" != system ] || need_system_launcher
    [ -e "$venv" ] || make_venv
    "$venv/bin/python" -c 'import pip' 2>/dev/null || die "$venv has no Python with pip in it: $redo"
    say "installing hvdlite[$extras] into $venv; the first time this downloads some 150 MB"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]" ||
        die "pip could not install the packages (its reason is above). No network, or only a mirror? Set https_proxy= or PIP_INDEX_URL= and type $again again"
    say "$venv is ready, after $(($(date +%s) - start)) s"
}

check() {
    "$venv/bin/python" -c '' 2>/dev/null || die "$venv/bin/python does not run (another Python was installed?): $redo"
    [ "$(cat "$venv/.ready")" = "$(pwd -P)" ] || die "$venv was made in another folder, whose hvdlite it would run: $redo"
    if [ -n "${PYTHON:-}" ]; then
        ask='import sys; print("%d.%d.%d" % sys.version_info[:3])'
        has=$("$venv/bin/python" -c "$ask") want=$("$PYTHON" -c "$ask" 2>/dev/null) || want="not to be found"
        [ "$has" = "$want" ] || die "$venv has Python $has, but PYTHON=$PYTHON is $want: $redo"
    fi
    for wheel in mpich openmpi impi_rt; do
        [ "$wheel" != "$MPI" ] || continue
        for found in "$venv"/lib/python3*/site-packages/"$wheel"-*.dist-info; do
            [ ! -d "$found" ] || die "$venv is for MPI=$MPI, but somebody installed the $wheel wheel into it: $redo"
        done
    done
    if [ "$MPI" != system ]; then
        [ -x "$venv/bin/mpiexec" ] || die "$venv has lost its mpiexec (was an MPI wheel removed?): $redo"
        return
    fi
    need_system_launcher
    log=$("$venv/bin/python" -m mpi4py --mpi-lib-version 2>&1) ||
        die "mpi4py cannot load an MPI library ($(echo "$log" | tail -n 1)): type module load ... (the site's MPI), or export MPI4PY_LIBMPI=/path/to/libmpi.so"
}

command=$1 venv=$2
shift 2
redo="type rm -rf $venv and $again again"
"$command" "$@"
