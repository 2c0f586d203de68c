#!/bin/sh
# Certificates for every service of docker-compose.yml: one authority in its own volume, and in each service's volume
# only what that service needs. Runs before the others. What is there stays; `renew` as an argument makes it anew.
set -eu
authority=/authority/virial-certs
owner=virial

authority() { virial admin certs "$@" --directory "$authority"; }

issue() { # KIND NAME [--host HOST]...
    kind=$1 name=$2
    shift 2
    if [ ! -d "$authority/$kind-$name" ]; then
        authority issue "$kind" "$name" "$@"
    elif [ "$action" = renew ]; then
        authority issue "$kind" "$name" "$@" --renew
    fi
}

give() { # FROM VOLUME FILE...: each whole or not at all; a key is its owner's alone
    from=$authority/$1 to=/tls/$2
    shift 2
    for file; do
        rm -f "$to/.$file.new"
        cp "$from/$file" "$to/.$file.new"
        case $file in *key.pem) chmod 0400 "$to/.$file.new" ;; *) chmod 0444 "$to/.$file.new" ;; esac
        chown "$owner" "$to/.$file.new"
        mv "$to/.$file.new" "$to/$file"
    done
}

action=${1:-issue}
umask 077
[ -d "$authority" ] || authority init compose
for i in 0 1 2; do
    issue controller "controld-$i" --host "controld-$i" --host "member-$i"
    give "controller-controld-$i" "controld-$i" key.pem certificate.pem ca.pem
    give "controller-controld-$i" "member-$i" member-key.pem member.pem members-ca.pem
done
for i in 0 1 2 3; do
    issue node "node-$i"
    give "node-node-$i" "node-$i" key.pem certificate.pem ca.pem
done
issue admin operator
give admin-operator cli key.pem certificate.pem ca.pem
