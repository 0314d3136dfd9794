package main

import (
	"context"
	"flag"
	"net"
	"os/signal"
	"syscall"
)

// headerLen is the size of a DNS message header (RFC 1035, 4.1.1).
const headerLen = 12

// runNXDomain answers every DNS query over UDP with "no such name".
func runNXDomain(args []string) (result, error) {
	fs := flag.NewFlagSet("nxdomain", flag.ContinueOnError)
	addr := fs.String("listen", "127.0.0.1:53", "UDP address")
	if err := parse(fs, args); err != nil {
		return nil, err
	}
	pc, err := net.ListenPacket("udp", *addr)
	if err != nil {
		return nil, err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, func() { pc.Close() })
	emit(result{"event": "listening", "addr": pc.LocalAddr().String()})
	buf := make([]byte, 4096)
	for {
		n, from, err := pc.ReadFrom(buf)
		if err != nil {
			if ctx.Err() != nil {
				return nil, nil
			}
			return nil, err
		}
		if answer := refuse(buf[:n]); answer != nil {
			if _, err := pc.WriteTo(answer, from); err != nil && ctx.Err() == nil {
				return nil, err
			}
		}
	}
}

// refuse turns a query with one question into an NXDOMAIN answer in place, or
// returns nil if it is not such a query.
func refuse(q []byte) []byte {
	if len(q) < headerLen || q[2]&0x80 != 0 || q[4] != 0 || q[5] != 1 {
		return nil
	}
	end := headerLen
	for end < len(q) && q[end] != 0 {
		end += 1 + int(q[end])
	}
	end += 1 + 4 // the root label, type and class
	if end > len(q) {
		return nil
	}
	q[2] = 0x84 | q[2]&0x01 // answer, authoritative, RD as asked
	q[3] = 0x80 | 3         // recursion available, NXDOMAIN
	clear(q[6:headerLen])   // no records: the query's EDNS record goes too
	return q[:end]
}
