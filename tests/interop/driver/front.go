package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/client"
)

// frontEnd says how to reach the server's front end, and what to dial through it.
type frontEnd struct {
	kind, uds, addr, ca, cert, key, target string
	// timeout bounds one dial, as the request context of an API server does.
	timeout time.Duration
	// limit bounds the whole run; a run that reaches it fails.
	limit time.Duration
	// allowBuffered keeps tunnel bytes that arrive in one read with the CONNECT
	// answer. An API server refuses them, so this is off unless asked for.
	allowBuffered bool

	tls *tls.Config
}

// newFrontEnd adds the common flags, parses args, loads the certificates and
// starts the watchdog.
func newFrontEnd(fs *flag.FlagSet, args []string) (*frontEnd, error) {
	f := &frontEnd{}
	fs.StringVar(&f.kind, "front", "", "grpc-uds, grpc-tcp, connect-uds or connect-tcp")
	fs.StringVar(&f.uds, "uds", "", "path of the front-end socket")
	fs.StringVar(&f.addr, "addr", "", "HOST:PORT of the front end")
	fs.StringVar(&f.ca, "ca", "", "file with the CA that signed the front end's certificate")
	fs.StringVar(&f.cert, "cert", "", "client certificate file")
	fs.StringVar(&f.key, "key", "", "client key file")
	fs.StringVar(&f.target, "target", "", "HOST:PORT to dial through the tunnel")
	fs.DurationVar(&f.timeout, "timeout", 30*time.Second, "limit of one dial")
	fs.DurationVar(&f.limit, "limit", 10*time.Minute, "limit of the whole run")
	fs.BoolVar(&f.allowBuffered, "allow-buffered", false, "accept tunnel bytes that come together with the CONNECT answer")
	if err := parse(fs, args); err != nil {
		return nil, err
	}
	if f.target == "" {
		return nil, errors.New("--target is required")
	}
	switch f.kind {
	case "grpc-uds", "connect-uds":
		if f.uds == "" {
			return nil, errors.New("--uds is required")
		}
	case "grpc-tcp", "connect-tcp":
		if err := f.loadTLS(); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("unknown --front %q", f.kind)
	}
	limit := f.limit
	time.AfterFunc(limit, func() { finish(nil, fmt.Errorf("run took longer than %v", limit)) })
	return f, nil
}

func (f *frontEnd) loadTLS() error {
	host, _, err := net.SplitHostPort(f.addr)
	if err != nil {
		return fmt.Errorf("--addr: %w", err)
	}
	pem, err := os.ReadFile(f.ca)
	if err != nil {
		return fmt.Errorf("--ca: %w", err)
	}
	pair, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return fmt.Errorf("--cert, --key: %w", err)
	}
	f.tls = &tls.Config{ServerName: host, RootCAs: x509.NewCertPool(), Certificates: []tls.Certificate{pair}}
	if !f.tls.RootCAs.AppendCertsFromPEM(pem) {
		return errors.New("--ca: no certificate found")
	}
	return nil
}

// dialError tells how far a dial came. stage is "connect" while there is no
// connection to the front end, and "proxy" after that.
type dialError struct {
	stage, reason, body string
	status              int
	err                 error
}

func (e *dialError) Error() string { return e.err.Error() }
func (e *dialError) Unwrap() error { return e.err }

// dial opens one tunnel to f.target within f.timeout.
func (f *frontEnd) dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	if strings.HasPrefix(f.kind, "grpc") {
		return f.dialGRPC(ctx)
	}
	return f.dialConnect(ctx)
}

// dialGRPC uses the client library as an API server does: a connection and a
// stream of its own for every dial. On a unix socket the bare path is the gRPC
// target, which makes the percent-encoded path the :authority.
func (f *frontEnd) dialGRPC(ctx context.Context) (net.Conn, error) {
	createCtx, stop := context.WithTimeout(ctx, 30*time.Second)
	defer stop()
	opts := []grpc.DialOption{grpc.WithBlock(), grpc.WithReturnConnectionError()}
	target := f.addr
	if f.kind == "grpc-uds" {
		target = f.uds
		opts = append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "unix", f.uds)
			}))
	} else {
		opts = append(opts, grpc.WithTransportCredentials(credentials.NewTLS(f.tls)))
	}
	tunnelCtx, cancel := context.WithCancel(context.Background())
	tunnel, err := client.CreateSingleUseGrpcTunnelWithContext(createCtx, tunnelCtx, target, opts...)
	if err != nil {
		cancel()
		return nil, &dialError{stage: "connect", err: err}
	}
	conn, err := tunnel.DialContext(ctx, "tcp", f.target)
	if err != nil {
		// The library tells the server about a given-up dial in the background;
		// leaving earlier would hide that from the server under test.
		select {
		case <-tunnel.Done():
		case <-time.After(5 * time.Second):
		}
		cancel()
		failed := &dialError{stage: "proxy", err: err}
		if known, reason := client.GetDialFailureReason(err); known {
			failed.reason = string(reason)
		}
		return nil, failed
	}
	return &grpcConn{Conn: conn, cancel: cancel}, nil
}

// grpcConn ends the tunnel's context with the connection.
type grpcConn struct {
	net.Conn
	cancel context.CancelFunc
}

func (c *grpcConn) Close() error {
	defer c.cancel()
	return c.Conn.Close()
}

// abort ends a connection without saying so to the peer, and wakes its reader.
func abort(c net.Conn) {
	if g, ok := c.(*grpcConn); ok {
		g.cancel()
		return
	}
	c.Close()
}

// dialConnect opens a tunnel with HTTP CONNECT: one connection per dial, the
// target in the request line, a fixed Host, and nothing but status 200 is good.
func (f *frontEnd) dialConnect(ctx context.Context) (net.Conn, error) {
	var raw net.Conn
	var err error
	if f.kind == "connect-uds" {
		raw, err = (&net.Dialer{}).DialContext(ctx, "unix", f.uds)
	} else {
		raw, err = (&tls.Dialer{Config: f.tls}).DialContext(ctx, "tcp", f.addr)
	}
	if err != nil {
		return nil, &dialError{stage: "connect", err: err}
	}
	// A cancelled dial closes the socket: that is all a server can see of it.
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	conn, err := f.connectThrough(raw)
	if !stop() && err != nil {
		err = &dialError{stage: "proxy", err: fmt.Errorf("%w: %w", context.Cause(ctx), err)}
	}
	if err != nil {
		raw.Close()
		return nil, err
	}
	return conn, nil
}

func (f *frontEnd) connectThrough(raw net.Conn) (net.Conn, error) {
	if _, err := fmt.Fprintf(raw, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", f.target, "127.0.0.1"); err != nil {
		return nil, &dialError{stage: "proxy", err: err}
	}
	br := bufio.NewReader(raw)
	res, err := http.ReadResponse(br, nil)
	if err != nil {
		return nil, &dialError{stage: "proxy", err: fmt.Errorf("reading HTTP response from CONNECT failed: %w", err)}
	}
	if res.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(res.Body, 64<<10))
		return nil, &dialError{stage: "proxy", status: res.StatusCode, body: string(body),
			err: fmt.Errorf("proxy error while dialing %s, code %d: %s", f.target, res.StatusCode, res.Status)}
	}
	n := br.Buffered()
	if n > 0 && !f.allowBuffered {
		return nil, &dialError{stage: "proxy", status: res.StatusCode,
			err: fmt.Errorf("unexpected %d bytes of buffered data from CONNECT proxy", n)}
	}
	if n > 0 {
		return &bufferedConn{Conn: raw, r: br}, nil
	}
	return raw, nil
}

// bufferedConn reads what is left in the buffer before the connection.
type bufferedConn struct {
	net.Conn
	r *bufio.Reader
}

func (c *bufferedConn) Read(b []byte) (int, error) { return c.r.Read(b) }

// closeWrite ends the client's direction only.
func closeWrite(c net.Conn) error {
	if b, ok := c.(*bufferedConn); ok {
		c = b.Conn
	}
	half, ok := c.(interface{ CloseWrite() error })
	if !ok {
		return errors.New("this front end has no half close")
	}
	return half.CloseWrite()
}

// describe adds what a failed dial is known by to a result.
func describe(r result, err error) {
	var d *dialError
	if !errors.As(err, &d) {
		return
	}
	r["stage"] = d.stage
	if d.reason != "" {
		r["reason"] = d.reason
	}
	if d.status != 0 {
		r["status"] = d.status
		r["body"] = d.body
	}
}
