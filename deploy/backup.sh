#!/usr/bin/env bash
# What neither git nor a rebuild brings back: the registry's database and artefacts, DVC's files, the audit log, who signed
# which stage, counts of what is watched, public keys. Start it in the project's root, with its environment on the path:
#
#   deploy/backup.sh make FOLDER [--with-private-key]
#   deploy/backup.sh restore FOLDER
#
# The registry is the SQLite file of mlruns/, unless the variables of MLflow's own server name another:
# MLFLOW_BACKEND_STORE_URI (postgresql:// needs pg_dump and pg_restore; leave the password to PGPASSWORD) and
# MLFLOW_ARTIFACTS_DESTINATION (s3:// needs aws). DVC's files are those of the default remote, or without one of the cache. What DVC
# never pushes, as imported cases, is copied from the cache.
# A restore overwrites nothing but objects of DVC's cache, which are named by what they hold, and says whose keys it brings. Without --with-private-key the signing key stays where it is: whoever has it can sign.
set -euo pipefail
export LC_ALL=C
umask 077

fail() { echo "clinrl: $*" >&2; exit 1; }

[[ $# -ge 2 && $1 =~ ^(make|restore)$ ]] || { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
verb=$1 folder=$2 store=${MLFLOW_BACKEND_STORE_URI:-sqlite:///mlruns/mlflow.db}
artifacts=${MLFLOW_ARTIFACTS_DESTINATION:-mlruns/artifacts}
[[ ! $store =~ ://[^/@]*:[^/@]*@|[?\&]password= ]] || fail 'MLFLOW_BACKEND_STORE_URI holds a password, which `ps` would show; use PGPASSWORD'
[[ -z ${MLFLOW_TRACKING_URI-} || -n ${MLFLOW_BACKEND_STORE_URI-} ]] ||
    fail 'MLFLOW_TRACKING_URI names the registry; set MLFLOW_BACKEND_STORE_URI to the database behind it, or unset it for that of mlruns/'
audit_log=data/reports/decisions.jsonl keys=.clinrl/keys watched=.clinrl/watched
kept=(.clinrl/champions .clinrl/provenance "$keys/signing.pub" "$keys/trusted")
case "${3-}" in
    "") ;;
    --with-private-key) kept+=("$keys/signing.pem") ;;
    *) fail "$3 is no option; there is --with-private-key" ;;
esac

# Where DVC's files are: an address of the default remote, or the folder of the cache; and that folder.
dvc_files() {
    python -c '
import os, sys
from dvc.repo import Repo
with Repo() as repo:
    name = repo.config["core"].get("remote")
    remote = repo.config["remote"][name] if name else {"url": repo.cache.local_cache_dir}
    at = remote.get("endpointurl")
    if at and not os.environ.get("AWS_ENDPOINT_URL"):  # or the bucket of that name at AWS is asked
        sys.exit(f"clinrl: set AWS_ENDPOINT_URL to {at}, where DVC has its remote {name}")
    print(remote["url"])
    print(repo.cache.local_cache_dir)'
}

# Copies from the cache what the remote has not: what was not pushed yet, and what `push: false` keeps here. REMOTE TO
copy_unpushed() {
    python -c '
import shutil, sys
from pathlib import Path
from dvc.repo import Repo
with Repo() as repo:
    for out in repo.index.outs:
        if not out.hash_info:
            continue
        top, found = out.hash_info.value, None
        if out.cache.exists(top):
            held = [top, *(one.value for *_, one in out.get_obj())] if out.hash_info.isdir else [top]
            found = [Path(out.cache.oid_to_path(one)) for one in held]
        if not found or not all(path.exists() for path in found):
            if out.can_push:
                continue
            says = "is not in the cache, so it is not in this backup; make one where it was imported"
            print(f"clinrl: {out} {says}", file=sys.stderr)
            continue
        for path in found:
            place = path.relative_to(repo.cache.local_cache_dir)
            to = Path(sys.argv[2], place)
            if Path(sys.argv[1], place).exists():
                continue
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)' "$1" "$2"
}

# Copies a file or a folder beside others who write to it: no temporary file of DVC or clinrl, nothing that vanishes meanwhile,
# and again what changed while it was copied. DVC takes a listing (.dir) for its parts and writes it after them, so listings are
# copied first. FROM TO [follow], where `follow` copies what a link leads to
copy_whole() {
    python -c '
import os, shutil, sys
source, target, *follow = sys.argv[1:]

def copy(one, to):
    for _ in range(9):
        before = os.stat(one)
        if os.path.lexists(to):
            os.unlink(to)  # an object of the cache may only be read
        try:
            shutil.copy2(one, to)
            after = os.stat(one)
        except FileNotFoundError:  # it may have vanished when half of it was copied
            if os.path.lexists(to):
                os.unlink(to)
            raise
        if (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns):
            return
    raise OSError(f"{one} changes all the time")

temporary = shutil.ignore_patterns(".*.tmp", ".*.partial-*", ".*.former-*")
for listings in (True, False):
    def but(folder, names):
        paths = {one: os.path.join(folder, one) for one in names}
        walked = {one for one, at in paths.items() if os.path.isdir(at) and (follow or not os.path.islink(at))}
        return {one for one in names if one.endswith(".dir") != listings} - walked | temporary(folder, names)

    try:
        if os.path.isdir(source):
            shutil.copytree(source, target, symlinks=not follow, ignore=but, copy_function=copy, dirs_exist_ok=True)
        elif not listings:
            copy(source, target)
    except shutil.Error as error:
        for one, _, why in error.args[0]:  # what vanished may be there again by now
            if os.path.lexists(one) and (os.path.islink(one) or "[Errno 2]" not in why):
                sys.exit(f"clinrl: {one} cannot be copied: {why}")
    except OSError as error:
        sys.exit(f"clinrl: {error}")' "$@"
}

# Copies a folder, or what begins with an address in a bucket. FROM TO
copy() {
    [[ $1 == s3://* || -d $1 ]] || return 0  # a bucket that was empty left no folder
    if [[ $1$2 == *s3://* ]]; then
        aws s3 sync --only-show-errors --exclude '*' --include '*.dir' "$1" "$2"
        aws s3 sync --only-show-errors --exclude '*.dir' "$1" "$2"
    else
        copy_whole "$1" "$2"
    fi
}

# Copies a SQLite file as it is at one moment, whoever writes to it. FROM TO
copy_database() {
    python -c 'import sqlite3, sys; a, b = map(sqlite3.connect, sys.argv[1:]); a.backup(b); b.close()' "$1" "$2"
}

# Whether something is in a folder, or begins with an address in a bucket.
holds() {
    if [[ $1 == s3://* ]]; then
        local at=${1#s3://} found  # `aws s3 ls` fails for an empty address as for one that is away
        found=$(aws s3api list-objects-v2 --bucket "${at%%/*}" --prefix "${at#*/}/" --max-keys 1 --output text \
            --query 'length(Contents||`[]`)') || fail "$1 cannot be listed; nothing was restored"
        [[ $found != 0 ]]
    else
        [[ -d $1 && $(ls -A "$1") ]]
    fi
}

listed() { (cd "$folder" && find . -type f ! -path './SHA256SUMS*' -print0 | sort -z); }

make_backup() {
    [[ ! -e $folder ]] || fail "$folder exists; a backup is a new folder"
    for place in "$artifacts" "$files"; do
        [[ $place == s3://* || -d $place ]] || fail "$place is neither a folder that is here nor s3://; nothing was backed up"
    done
    mkdir -p "$(dirname "$folder")"
    mkdir "$folder"
    trap '[[ -f $folder/SHA256SUMS ]] || rm -rf "$folder"' EXIT  # so that the same command can be given again
    mkdir "$folder/checkout"
    while :; do  # a release or a rollback beside this is in both log and database, in neither, or as after a kill
        [[ ! -e $audit_log ]] || cp -aL --parents "$audit_log" "$folder/checkout"
        case $store in  # before the artefacts, which are only ever added to: what the copy names is there
            sqlite:///*)
                [[ -f ${store#sqlite:///} ]] || fail "${store#sqlite:///} does not exist; start in the project's root"
                copy_database "${store#sqlite:///}" "$folder/mlflow.db" ;;
            postgresql*) pg_dump --format=custom --no-owner --file="$folder/mlflow.dump" "postgresql:${store#*:}" ;;
            *) fail "MLFLOW_BACKEND_STORE_URI names neither sqlite:/// nor postgresql://" ;;
        esac
        [[ -e $audit_log ]] && ! cmp -s "$audit_log" "$folder/checkout/$audit_log" || break
    done
    copy "$artifacts" "$folder/artifacts"
    copy "$files" "$folder/dvc"
    [[ $files == "$cache" ]] || copy_unpushed "$folder/dvc" "$folder/unpushed"
    for path in "${kept[@]}"; do
        [[ ! -e $path ]] || { mkdir -p "$folder/checkout/$(dirname "$path")" && copy_whole "$path" "$folder/checkout/$path" follow; }
    done
    for path in "$watched"/*.sqlite; do
        [[ ! -f $path ]] || { mkdir -p "$folder/checkout/$watched" && copy_database "$path" "$folder/checkout/$path"; }
    done
    local link=$(find "$folder/" -type l -print -quit)
    [[ -z $link ]] || fail "${link#"$folder/"} is a link, which no restore takes; remove it where it was copied from"
    listed | (cd "$folder" && xargs -0 sha256sum) > "$folder/SHA256SUMS.new"
    mv "$folder/SHA256SUMS.new" "$folder/SHA256SUMS"
}

check() {
    local bad
    [[ -f $folder/SHA256SUMS ]] || fail "$folder is no whole backup: SHA256SUMS, which is written last, is missing"
    bad=$(cd "$folder" && sha256sum --check --strict --quiet SHA256SUMS 2>/dev/null | head -n 1) ||
        fail "$folder is damaged${bad:+, as in ${bad%%: FAILED*}}; nothing was restored, take another backup"
    [[ $(listed | tr -cd '\0' | wc -c) -eq $(wc -l < "$folder/SHA256SUMS") ]] ||
        fail "$folder is damaged: SHA256SUMS does not list its files; nothing was restored, take another backup"
}

restore_backup() {
    local left  # an old journal would be played into the new store
    for left in "${store#sqlite:///}"{,-journal,-wal}; do
        [[ $store != sqlite:* || ! -e $left ]] || fail "$left exists; move it away first"
    done
    ! holds "$artifacts" || fail "$artifacts is not empty; move it away first"
    local later= saved=$folder/checkout/$audit_log
    if [[ -e $audit_log ]] && ! cmp -s -n "$(stat -c %s "$audit_log")" "$audit_log" "$saved"; then
        [[ ! -e $saved ]] || cmp -s -n "$(stat -c %s "$saved")" "$saved" "$audit_log" ||
            fail "$audit_log has lines that the backup has not, and the backup has others; move it away if the backup is right"
        later=1
    fi
    [[ ! -e $keys/signing.pub ]] || cmp -s "$keys/signing.pub" "$folder/checkout/$keys/signing.pub" ||
        fail "$keys holds the key of another checkout; move it away, and trust it with \`clinrl keys trust\` afterwards"
    [[ -z $(find "$folder/" -type l -print -quit) ]] || fail "$folder holds a link, which no backup does; nothing was restored"
    case $store in
        sqlite:///*)
            [[ -f $folder/mlflow.db ]] || fail "$folder holds a dump of PostgreSQL; name it in MLFLOW_BACKEND_STORE_URI"
            mkdir -p "$(dirname "${store#sqlite:///}")" && cp "$folder/mlflow.db" "${store#sqlite:///}" ;;
        *)
            [[ -f $folder/mlflow.dump ]] || fail "$folder holds a SQLite file; unset MLFLOW_BACKEND_STORE_URI"
            pg_restore --single-transaction --exit-on-error --no-owner --dbname="postgresql:${store#*:}" "$folder/mlflow.dump" ||
                fail "PostgreSQL took nothing: restore into an empty database" ;;
    esac
    copy "$folder/artifacts" "$artifacts"
    copy "$folder/dvc" "$files"
    copy "$folder/unpushed" "$cache"
    [[ $later || ! -e $saved ]] || { mkdir -p "${audit_log%/*}" && cp "$saved" "$audit_log"; }
    local path there=() own=
    [[ -e $keys/signing.pub || ! -e $folder/checkout/$keys/signing.pub ]] || own=1
    for path in "${kept[@]}" "$keys/signing.pem" "$watched"; do  # and nothing else that lies there
        [[ ! -e $folder/checkout/$path ]] || there+=("$path")
    done
    [[ ${#there[@]} -eq 0 ]] || tar -C "$folder/checkout" -c "${there[@]}" | tar -x --skip-old-files
    [[ ! $own ]] || echo "clinrl: this checkout's key is that of the backup: $(cut -d ' ' -f 2 "$keys/signing.pub")" >&2
    for path in "$folder/checkout/$keys/trusted"/*.pub; do
        [[ ! -f $path ]] || echo "clinrl: signatures of $(basename "$path" .pub) count here, as in the backup" >&2
    done
    [[ ! $later ]] ||
        echo "clinrl: $audit_log is younger than the backup and stays; register what was promoted since, and see docs/operations.md" >&2
    echo 'clinrl: restored; `python -m clinrl.runtime.dvc_command checkout` or `pull` brings the files, `clinrl lineage NAME` checks them' >&2
}

[[ $verb == make ]] || check
places=$(dvc_files)
files=${places%$'\n'*} cache=${places##*$'\n'}
"${verb}_backup"
